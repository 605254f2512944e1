"""All rules that come with fedtailor: importing this package fills the tables in ``rules.py``.

``trace.py`` imports it for that; ``numbering.py`` finds the rules in the tables.

| file               | how channels pass through                                          |
|--------------------|--------------------------------------------------------------------|
| `layers.py`        | convolutions, linear layers, embeddings                            |
| `normalisation.py` | normalisation per channel, per group of channels, over all of them |
| `recurrent.py`     | LSTM, GRU, RNN and their cells                                     |
| `attention.py`     | multi-head attention                                               |
| `products.py`      | matrix products, einsum                                            |
| `functions.py`     | element-wise functions, reductions, constants that the code makes  |
| `spatial.py`       | pooling, padding, resizing                                         |
| `shapes.py`        | reshaping, permuting, joining, splitting, repeating                |
| `slices.py`        | indexing                                                           |
"""

from fedtailor.elasticity.tracing.rulebook import (
    attention,
    functions,
    layers,
    normalisation,
    products,
    recurrent,
    shapes,
    slices,
    spatial,
)

__all__ = [
    "attention",
    "functions",
    "layers",
    "normalisation",
    "products",
    "recurrent",
    "shapes",
    "slices",
    "spatial",
]
