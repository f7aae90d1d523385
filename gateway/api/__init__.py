"""The APIs that clients speak: each module holds all that the gateway knows about one of them."""
