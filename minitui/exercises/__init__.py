"""Exercises: students write five decisions of the scheduler; the real engine runs them over a simulated device."""
