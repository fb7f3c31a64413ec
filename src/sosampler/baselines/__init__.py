"""Methods the sampler is compared with."""
