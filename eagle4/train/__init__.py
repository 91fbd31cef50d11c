"""Training drafters: data from the target itself, features, losses, steps, the loop."""
