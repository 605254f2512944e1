"""The known data sets, one file for each family: importing this package registers them all."""

from fedtailor.data.catalogue import cifar as cifar
from fedtailor.data.catalogue import digits as digits
from fedtailor.data.catalogue import embedded as embedded
from fedtailor.data.catalogue import femnist as femnist
from fedtailor.data.catalogue import mnist as mnist
from fedtailor.data.catalogue import shakespeare as shakespeare
from fedtailor.data.catalogue import svhn as svhn
