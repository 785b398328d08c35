"""Measure what runs do not record: links, collectives, transports, models in inference, and models evaluated again."""
