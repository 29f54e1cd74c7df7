"""What can be seen of the server: /metrics, /health, and the records for minitui's own client."""
