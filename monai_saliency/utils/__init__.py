"""What every room needs: arguments, boxes, precision, tensors, optional imports, timing, profiling, patch grid,
and the private names of other packages.
"""
