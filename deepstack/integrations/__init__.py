"""Outside systems, one folder each: clusters, trackers, tokenizers, model libraries.

The core finds them by the names of their files (`deepstack.base.extensions`)."""
