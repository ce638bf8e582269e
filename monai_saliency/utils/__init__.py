"""Helpers for every room: arguments, boxes, precision, tensors, optional imports, ranks, timing, profiling, patch grid,
and the private names of other packages.
"""
