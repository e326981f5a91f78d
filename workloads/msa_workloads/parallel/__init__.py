"""How a model and its data are split over ranks."""
