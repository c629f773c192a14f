"""Copies blocks between arrays that may lie in different memory spaces."""

from pallas_kernels.block_copy.api import block_copy as block_copy
