"""For developers, not in the wheel: pictures, measurements, simulated engines, training of the bundled model."""
