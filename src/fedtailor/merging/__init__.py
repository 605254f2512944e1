"""How updates become the next global weights: the one merge rule, and what the server makes of the mean."""

from fedtailor.merging.holders import WEIGHTINGS as WEIGHTINGS
from fedtailor.merging.holders import by_count as by_count
from fedtailor.merging.holders import by_samples as by_samples
from fedtailor.merging.holders import holder_mean as holder_mean
from fedtailor.merging.holders import mean_over_holders as mean_over_holders
