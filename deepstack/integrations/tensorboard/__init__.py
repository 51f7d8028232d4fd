"""Event files of TensorBoard, while a run trains and from finished runs."""
