"""Models, and the wrapper that runs any model context-parallel inside and whole outside."""

from lightning_dcp.models.decoder import Decoder

__all__ = ["Decoder"]
