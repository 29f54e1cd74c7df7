"""The columns of the table of sampling settings on the device. The table has one row for each running request."""

TEMPERATURE, NOISE, TOP_P, LOG_MIN_P, REPETITION, PRESENCE, FREQUENCY, NUM_SETTINGS = range(8)
