"""Run sampler and classifier fast on a device."""
