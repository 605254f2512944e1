"""What a piece costs, and which piece fits a budget."""
