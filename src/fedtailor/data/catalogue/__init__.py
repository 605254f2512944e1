"""The known data sets: importing this package registers them all."""

from fedtailor.data.catalogue import digits as digits
from fedtailor.data.catalogue import mnist as mnist
