"""Kernels that move blocks between arrays: arrays in, arrays out. They know nothing of tokens or of groups."""

from pallas_kernels.block_copy import block_copy as block_copy
from pallas_kernels.packing import pack as pack
from pallas_kernels.packing import unpack as unpack
