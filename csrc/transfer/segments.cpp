#include "transfer/segments.h"

namespace tensorferry {

void Segments::add(char* memory, uint64_t nbytes, std::shared_ptr<cuda::Gate> gate) {
  uint32_t index = host;
  if (gate) {
    const auto found = std::find(gates_.begin(), gates_.end(), gate);
    index = static_cast<uint32_t>(found - gates_.begin());
    if (found == gates_.end()) gates_.push_back(std::move(gate));
  }
  pieces_.push_back({memory, nbytes_, nbytes, index, pieces_.size()});
  nbytes_ += nbytes;
}

}  // namespace tensorferry
