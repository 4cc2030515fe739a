#include "memory/first_touch.h"

#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace tensorferry {
namespace {

uintptr_t page_mask() {
  static const auto mask = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE)) - 1;
  return mask;
}

bool is_there(uintptr_t address) {
  unsigned char there = 0;
  // Memory that is not the process's is nothing to be touched.
  return ::mincore(reinterpret_cast<void*>(address & ~page_mask()), 1, &there) != 0 || (there & 1) != 0;
}

}  // namespace

bool is_untouched(const char* memory, uint64_t nbytes) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  return nbytes > 0 && (!is_there(begin) || !is_there(begin + nbytes - 1));
}

void touch(char* memory, uint64_t nbytes) {
  const auto begin = reinterpret_cast<uintptr_t>(memory) & ~page_mask();
  const auto end = reinterpret_cast<uintptr_t>(memory) + nbytes;
  (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
}

}  // namespace tensorferry
