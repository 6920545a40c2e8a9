"""One folder for each external system: its driver, and nothing else that knows it."""

if __name__ != "esp_pubsub.transports":
    raise ImportError(f"{__name__} is not a package of its own: import esp_pubsub.transports", name=__name__)
