"""All models of the zoo, by library and name."""

from __future__ import annotations

from zoo import timm_models, torchvision_models, transformers_models

CATALOGUE = {
    entry.key: entry
    for entry in (*torchvision_models.ENTRIES, *timm_models.ENTRIES, *transformers_models.ENTRIES)
}
