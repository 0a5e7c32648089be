"""Block formats of stored weights: layouts and reference dequantizers."""

from octavo.quant.formats import Format, RawTensor

__all__ = ["Format", "RawTensor"]
