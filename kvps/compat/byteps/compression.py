"""BytePS's compression of gradients, which is Horovod's."""

from kvps.compat.horovod.compression import Compression, Compressor, FP16Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
