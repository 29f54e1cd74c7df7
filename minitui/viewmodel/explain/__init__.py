"""Why something took as long as it did, and what comes next."""
