"""What a cut and a patch are, and how values are taken out of tensors and put back."""
