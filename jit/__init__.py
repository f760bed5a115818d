"""From a stage to a library: the registry of stages, the just-in-time loader, the search for nvcc."""
