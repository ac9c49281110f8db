"""From the name of a data set to batches on the device, and the model that reads them."""
