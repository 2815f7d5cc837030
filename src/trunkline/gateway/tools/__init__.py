"""Tool calls: what clients declare, and how families of models write them."""
