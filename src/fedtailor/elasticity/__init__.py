"""How a model is cut: from an unmodified ``nn.Module`` to pieces of any size, and back. Enter by ``front_door``."""
