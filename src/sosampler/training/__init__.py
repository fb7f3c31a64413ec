"""Train classifiers, samplers and baselines."""
