"""The columns of the device's table of sampling settings, which has a row for each running request."""

TEMPERATURE, NOISE, TOP_P, LOG_MIN_P, REPETITION, PRESENCE, FREQUENCY, NUM_SETTINGS = range(8)
