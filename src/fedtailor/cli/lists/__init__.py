"""Commands that say what there is: methods, models, data sets, runs."""
