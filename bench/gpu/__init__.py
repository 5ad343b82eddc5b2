"""Steps and kernels on a GPU, beside other libraries and compilers."""
