"""3-D convolutional networks."""
