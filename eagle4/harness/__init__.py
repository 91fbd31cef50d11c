"""What a guess costs, and whether it pays: policies and cost tables."""
