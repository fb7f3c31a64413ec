"""Run a sampler and a classifier fast on one device."""
