"""The operations as Triton kernels: imported only where tensors live on a GPU, so that a CPU needs no Triton.

Each file here has its contract and its plain torch reference in the file of the same name one folder up.
"""
