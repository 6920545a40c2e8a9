"""Events at their time and crons, for many tenants: a model that an engine runs. It uses public names of esp_pubsub."""
