"""The Trainer, with the traps taken out that falsify a comparison."""
