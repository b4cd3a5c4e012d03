"""Measurements of this machine: seconds of collectives and kernels, and the links and speeds that explain them."""
