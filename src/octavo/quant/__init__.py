"""Block formats of stored weights: layouts, and what their bits mean."""

from octavo.quant.dequantize import dequantize, quantize
from octavo.quant.formats import Format, RawTensor

__all__ = ["Format", "RawTensor", "dequantize", "quantize"]
