"""The target plane: the served model, its cache, the round loop and the actor around it."""
