"""Host kernels: C++ products with stored weights, where a compiler was found."""
