"""How a model is cut: from an unmodified ``nn.Module`` to pieces of any size and back; ``front_door`` is the way in."""
