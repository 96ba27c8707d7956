"""Code generation: vectors, register tiles and elementary functions as LLVM IR."""
