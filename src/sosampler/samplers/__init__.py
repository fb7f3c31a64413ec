"""Networks that learn to score frames."""
