"""Jobs that turn image corpora into datasets on storage; they need no torch."""
