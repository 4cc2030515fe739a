#include "file/mapping.h"

#include <errno.h>
#include <sys/mman.h>

namespace tensorferry {
namespace {

constexpr size_t huge_nbytes = size_t{2} << 20;

size_t rounded_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Puts one piece in the place of reserved addresses; the error number, or 0.
int map_piece(const Mapping::Piece& piece, char* at) {
  constexpr int flags = MAP_PRIVATE | MAP_FIXED;
  if (!piece.file) {
    if (::mmap(at, piece.nbytes, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0) == MAP_FAILED) return errno;
    // Advice: a kernel without huge pages says EINVAL, and ordinary pages serve.
    if (piece.nbytes >= huge_nbytes) (void)::madvise(at, piece.nbytes, MADV_HUGEPAGE);
    return 0;
  }
  const auto lease = piece.file->lease();
  const int descriptor = lease ? piece.file->descriptor() : -1;
  void* mapped = ::mmap(at, piece.nbytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, descriptor,
                        static_cast<off_t>(piece.offset));
  return mapped == MAP_FAILED ? errno : 0;
}

// How far behind a huge page's begin the first byte is to lie: a cache maps its huge pages whole only where file and
// addresses are alike in it (Linux, filemap_map_pmd).
size_t into_huge_page(const std::vector<Mapping::Piece>& pieces) {
  uint64_t before = 0;
  for (const Mapping::Piece& piece : pieces) {
    if (piece.file) return (piece.offset - before) % huge_nbytes;  // also where it wraps around: a power of two
    before += piece.nbytes;
  }
  return 0;
}

}  // namespace

Result<std::unique_ptr<Mapping>> Mapping::create(const std::vector<Piece>& pieces) {
  size_t nbytes = 0;
  auto refused = [](const Piece& piece, int error_number, size_t expected) {
    return Fault{.error_number = error_number,
                 .operation = "mmap",
                 .path = piece.file ? piece.file->path() : std::string(),
                 .offset = piece.offset,
                 .expected = expected};
  };
  for (const Piece& piece : pieces) {
    if (piece.offset % page_nbytes() != 0) return refused(piece, EINVAL, piece.nbytes);  // as mmap says
    if (__builtin_add_overflow(nbytes, piece.nbytes, &nbytes)) return refused(piece, ENOMEM, piece.nbytes);
  }
  if (nbytes > SIZE_MAX / 2) return refused(pieces.front(), ENOMEM, nbytes);
  // The addresses first: the pieces then replace parts of what is ours already.
  const size_t used = rounded_up(nbytes, page_nbytes());
  const size_t granule = nbytes >= huge_nbytes ? huge_nbytes : page_nbytes();
  const size_t into = into_huge_page(pieces) % granule;
  const size_t reserved_nbytes = used + granule - page_nbytes();
  void* reserved = ::mmap(nullptr, reserved_nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return refused(pieces.front(), errno, nbytes);
  char* begin = static_cast<char*>(reserved);
  char* data = reinterpret_cast<char*>(rounded_up(reinterpret_cast<uintptr_t>(reserved) - into, granule) + into);
  // It can only fail for want of memory for one mapping more, and then nothing but addresses is lost.
  if (data > begin) (void)::munmap(begin, static_cast<size_t>(data - begin));
  char* const end = begin + reserved_nbytes;
  if (data + used < end) (void)::munmap(data + used, static_cast<size_t>(end - (data + used)));
  std::unique_ptr<Mapping> mapping(new Mapping(data, nbytes));
  char* at = data;
  for (const Piece& piece : pieces) {
    if (const int error_number = map_piece(piece, at)) return refused(piece, error_number, piece.nbytes);
    at += piece.nbytes;
  }
  return mapping;
}

void Mapping::forget(size_t begin, size_t end) {
  const size_t page = page_nbytes();
  const size_t first = rounded_up(begin, page);
  const size_t last = end / page * page;
  // It can only fail for memory that is locked, which then stays until the mapping goes.
  if (first < last) (void)::madvise(data_ + first, last - first, MADV_DONTNEED);
}

Mapping::~Mapping() { (void)::munmap(data_, nbytes_); }  // it can only fail for arguments that are wrong

}  // namespace tensorferry
