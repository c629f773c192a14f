"""Turns blocks of several arrays into units of a pool, and back."""

from pallas_kernels.packing.api import pack as pack
from pallas_kernels.packing.api import unpack as unpack
