"""Fast training of small networks on a CPU: C kernels, and what decides where they are used."""
