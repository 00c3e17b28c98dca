// y = x W^T for a few rows of x. Bound by reading W from memory. small_m_gemm.py describes inputs
// and outputs. Compiled by NVRTC for compute capability 9.0 and above.
//
// The grid is persistent, one CTA per multiprocessor. A worker is a CTA or a cluster of CTAs. It
// takes every num_workers-th tile of 16 * row_groups rows of W, and each of its CTAs takes a share
// of the columns. The CTA's share of x stays in shared memory. A warp takes 16 rows of the tile.
// The column groups (warps with the same rows) take steps of STEP_COLUMNS columns round-robin.
// Each warp has its own ring of DEPTH steps in shared memory, filled by asynchronous copies that
// run ahead across tiles, so warps synchronize only at the end of a tile.
//
// The norm's weight is multiplied into x on its way into shared memory. The division by the root
// mean square is applied to the finished sums, so it does not delay the start.
//
// W does not depend on earlier kernels. With programmatic dependent launch the copies of its first
// steps start while the previous kernel still runs. Nothing else is read or written before
// `griddepcontrol.wait`, but slots of adapters, whose B is fetched into the cache.
//
// The order of the columns inside a dot product does not matter as long as W and x use the same
// one. A thread multiplies the 8 adjacent elements of one 16-byte piece of W by those of x. The
// pieces are chosen so that the 8 threads that read together use different banks.
//
// W may be FP8 (E4M3) with a float32 scale for each row and each 128 columns, which are a block:
// W is converted in registers, exactly, and the sums of a block are multiplied by its rows' scales.
// The scales of a step lie in the ring after its weights.
//
// W may also have codes of 4 bits, as int4_weights.py stores them: a byte has the codes of two
// columns that are 64 apart. A word for each row and each GROUP columns has the scale and the zero
// point, or of E2M1 a byte has the scale's exponent. A code minus its zero point is a 16-bit
// number without rounding, and so is an E2M1 number.
// All columns of one instruction belong to one group.
//
// Compiler options define BFLOAT16 (otherwise float16: x, and W of 16 bits), BITS of a number of W
// (16, 8 for FP8, or 4), GROUP (columns that share a scale; 0 for 16 bits), E2M1 (whether codes of
// 4 bits are such numbers), STEP_COLUMNS (a multiple of a block's, at most 32 pieces), DEPTH, and
// ADAPTERS (whether rows may have low-rank adapters, which are added before the gate).

#include "small_m_block.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int STEP_PIECES = BLOCKS * BLOCK_PIECES;
constexpr int STEP_SCALES = 16 * ROW_SCALES;
constexpr int LANE_SCALES = ROW_SCALES > 1 ? ROW_SCALES / 2 : 1;  // that a lane copies
constexpr int MOST_SCALES = 16 / sizeof(Scale);
constexpr int SCALE_PIECE = LANE_SCALES < MOST_SCALES ? LANE_SCALES : MOST_SCALES;  // at a time
constexpr int LANES_PER_ROW = STEP_COLUMNS / WEIGHT_PIECE, ROWS_PER_COPY = 32 / LANES_PER_ROW;
constexpr int COPIES = 16 / ROWS_PER_COPY, HALF_COPIES = COPIES / 2;  // half: of 8 rows
// Bytes of a step in a ring: whole rows of 128, so that the XOR of `swizzle` stays within one.
constexpr int SLOT_BYTES = (16 * STEP_PIECES + STEP_SCALES * sizeof(Scale) + 127) / 128 * 128;
// Of a ring, fetched before x. On an H200 x comes late after many of 4 bits; wider ones need them.
constexpr int EARLY_SLOTS = BITS == 4 ? 1 : DEPTH - 1;
constexpr int TOKENS = 8;                 // most rows of x: the n of the tensor cores' m16n8k16
constexpr int SUMS = 8 * WARPS * TOKENS;  // partial sums of a tile's row pairs, all column groups

__device__ inline float widen(u16 value) { return unpack(value).x; }
__device__ inline u16 narrow(float value) { return static_cast<u16>(pack(value, 0.0f)); }

__device__ inline uint4 load_piece(const u16* source) {
    uint4 piece;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w) : "l"(source));
    return piece;
}

// No L2 prefetch size: with `.L2::256B` every GEMM was slower on an H200.
__device__ inline void copy_piece(u32 destination, const Weight* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
        :: "r"(destination), "l"(source) : "memory");
}

__device__ inline void copy_scales(u32 destination, const Scale* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
        :: "r"(destination), "l"(source), "n"(sizeof(Scale) * SCALE_PIECE) : "memory");
}

#if ADAPTERS
// Low-rank adapters (adapter_gemm.py), `out += B s`. Same layout as _Expansion in small_m_gemm.py.
struct Expansion {
    const u16 *b;
    const float* sums;
    const int *slots, *ranks;
    long long slot_stride;
    int num_parts, step;
    int end_0, end_1, end_2;

    // Rows without an adapter keep their bits.
    __device__ float added(int row, int token, float value) const {
        const int slot = slots[token];
        if (slot < 0) return value;
        const int part = (row >= end_0) + (row >= end_1) + (row >= end_2);
        const int rank = ranks[slot * num_parts + part];
        const u16* factors = b + slot * slot_stride + static_cast<u64>(row) * step;
        const float* own = sums + (token * num_parts + part) * step;
        float sum = 0.0f;
#pragma unroll 2
        for (int r = 0; r < rank; r += PIECE) {
            const uint4 piece = *reinterpret_cast<const uint4*>(factors + r);
            const u32 pairs[4] = {piece.x, piece.y, piece.z, piece.w};
            for (int j = 0; j < 4; ++j) {
                const float2 both = unpack(pairs[j]);
                const float2 other = *reinterpret_cast<const float2*>(own + r + 2 * j);
                sum = fmaf(both.x, other.x, fmaf(both.y, other.y, sum));
            }
        }
        return rank > 0 ? value + sum : value;
    }
};
#endif

// Same layout as _Arguments in small_m_gemm.py.
struct Gemm {
    const u16 *x, *bias;
    const void* norm_weight;
    const u16 *residual, *ups;
    const Weight* weight;
    const Scale* scales;
    u16* out;
    int out_features, in_features, x_stride, out_stride;
    int num_tokens, num_tiles, row_groups, splits, gated, is_gelu, up_stride, has_wide_norm;
    float eps;

#if ADAPTERS
    Expansion adapters;
#endif

    // The two rows of W of a pair: rows r and r + 8 of a group of 16, or a row of the gate and the
    // matching row of `up`.
    __device__ int low_row(int tile, int pair) const {
        return (tile * row_groups + pair / 8) * (gated ? 8 : 16) + pair % 8;
    }
    __device__ int high_row(int low) const { return gated ? out_features / 2 + low : low + 8; }
    // Rows past the end are read as the last one; their sums are not written.
    __device__ u32 read_row(int low, bool high) const {
        const int half = out_features / 2, last = (gated ? half : out_features) - 1;
        return gated ? min(low, last) + high * half : min(low + 8 * high, last);
    }

    __device__ void write(int row, int token, float value) const {
        if (row >= out_features) return;
        const u64 index = static_cast<u64>(token) * out_stride + row;
        if (residual != nullptr) value += widen(residual[index]);
        out[index] = narrow(value);
    }

    // As `activation_slope` in norms.py.
    __device__ float activated(float gate) const {
        const float cubic = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
        return gate / (1.0f + __expf(-(is_gelu ? cubic : gate)));
    }
    // A finished sum of a row, or if `ups` are given, what it gates.
    __device__ float finished(int row, int token, float value) const {
        if (ups == nullptr || row >= out_features) return value;
        return activated(value) * widen(ups[static_cast<u64>(token) * up_stride + row]);
    }

    // Epilogue of a pair of rows, after all columns are summed.
    __device__ void finish(int low, int token, float first, float second) const {
        const int high = high_row(low);
        if (gated && low >= out_features / 2) return;
        if (bias != nullptr) {
            if (low < out_features) first += widen(bias[low]);
            if (high < out_features) second += widen(bias[high]);
        }
#if ADAPTERS
        if (low < out_features) first = adapters.added(low, token, first);
        if (high < out_features) second = adapters.added(high, token, second);
#endif
        if (gated) {
            write(low, token, activated(first) * second);
        } else {
            write(low, token, finished(low, token, first));
            write(high, token, finished(high, token, second));
        }
    }
};

// The part of the GEMM that this warp computes.
struct Part {
    int rank, first_tile, num_workers, group, column_group, column_groups;
    int share, first_column, num_steps;

    __device__ Part(const Gemm& p, int warp) {
        rank = p.splits == 1 ? 0 : cluster_rank();
        first_tile = blockIdx.x / p.splits;
        num_workers = gridDim.x / p.splits;
        group = warp % p.row_groups;
        column_group = warp / p.row_groups;
        column_groups = WARPS / p.row_groups;
        share = p.in_features / p.splits;
        first_column = rank * share;
        num_steps = share / STEP_COLUMNS;
    }
};

// The norm's weights of a piece, which have the type of x or are float32.
__device__ inline void load_factors(const Gemm& p, int column, float (&factors)[PIECE]) {
    if (p.has_wide_norm) {
        const float* source = static_cast<const float*>(p.norm_weight) + column;
#pragma unroll
        for (int i = 0; i < PIECE; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(source + i);
            factors[i] = four.x, factors[i + 1] = four.y;
            factors[i + 2] = four.z, factors[i + 3] = four.w;
        }
    } else {
        const uint4 piece = load_piece(static_cast<const u16*>(p.norm_weight) + column);
        const u32 pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 both = unpack(pairs[i]);
            factors[2 * i] = both.x, factors[2 * i + 1] = both.y;
        }
    }
}

// Copies columns [first, first + share) of x into shared memory, multiplied by the norm's weight.
// Writes each warp's sums of squares to `squares`.
__device__ inline void stage_tokens(
    const Gemm& p, uint4* tokens, int stride, float* squares, int first, int share) {
    const bool normed = p.norm_weight != nullptr;
    float square[TOKENS] = {};
#pragma unroll 2
    for (int piece = threadIdx.x; piece < share / PIECE; piece += THREADS) {
        const u16* source = p.x + first + piece * PIECE;
        uint4 batch[TOKENS];
#pragma unroll
        for (int i = 0; i < TOKENS; ++i)
            if (i < p.num_tokens) batch[i] = load_piece(source + static_cast<u64>(i) * p.x_stride);
        float factors[PIECE] = {};
        if (normed) load_factors(p, first + piece * PIECE, factors);
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            if (i >= p.num_tokens) break;
            if (normed) {
                u32 pairs[4] = {batch[i].x, batch[i].y, batch[i].z, batch[i].w};
                for (int j = 0; j < 4; ++j) {
                    const float2 both = unpack(pairs[j]);
                    square[i] = fmaf(both.x, both.x, fmaf(both.y, both.y, square[i]));
                    pairs[j] = pack(both.x * factors[2 * j], both.y * factors[2 * j + 1]);
                }
                batch[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
            tokens[i * stride + place(piece)] = prepared(batch[i], piece);
        }
    }
    if (normed) {
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            if (i >= p.num_tokens) break;
            for (int distance = 16; distance > 0; distance /= 2)
                square[i] += __shfl_xor_sync(~0u, square[i], distance);
            if (threadIdx.x % 32 == 0) squares[i * WARPS + threadIdx.x / 32] = square[i];
        }
    }
    __syncthreads();
}

// Reduces the partial sums of a worker's CTAs. Each CTA owns `run` pairs of every tile. All CTAs
// send it their partial sums of these pairs. It adds them in a fixed order one tile later, after
// the barrier that guarantees their arrival.
struct WorkerSum {
    const Gemm& p;
    const Part& part;
    float* received;  // [2][senders][2][run][TOKENS]; the first index is the tile's turn % 2
    float* squares;   // [splits][TOKENS]: sums of squares of each CTA's share of the columns
    int run;          // a power of two

    __device__ int senders() const { return p.splits * part.column_groups; }
    __device__ float* partial(int turn, int sender, int high, int pair) const {
        const int half = (turn % 2 * senders() + sender) * 2 + high;
        return received + (half * run + (pair & run - 1)) * TOKENS;
    }
    __device__ u32 address(const float* local, int rank) const {
        return remote_address(local, p.splits == 1 ? cluster_rank() : rank);
    }
    __device__ void arrive() const {
        if (p.splits > 1) cluster_arrive();
    }
    __device__ void wait() const {
        if (p.splits > 1) cluster_wait();
        else __syncthreads();
    }
    __device__ void send(int turn, int pair, int token, const float (&sum)[4]) const {
#pragma unroll
        for (int high = 0; high < 2; ++high) {
            const int sender = part.rank * part.column_groups + part.column_group;
            const float* local = partial(turn, sender, high, pair) + token;
            asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};"
                :: "r"(address(local, pair >= run)), "f"(sum[2 * high]), "f"(sum[2 * high + 1])
                : "memory");
        }
    }
    __device__ void send_squares(const float* of_warps) const {
        for (int i = threadIdx.x; i < p.num_tokens * p.splits; i += THREADS) {
            const int token = i % p.num_tokens;
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) sum += of_warps[token * WARPS + warp];
            const float* local = squares + part.rank * TOKENS + token;
            asm volatile("st.shared::cluster.f32 [%0], %1;"
                :: "r"(address(local, i / p.num_tokens)), "f"(sum) : "memory");
        }
    }
    // turn: of the tile. The warps take turns, since the others go on meanwhile.
    __device__ void finish(int tile, int turn) const {
#pragma unroll 1
        for (int i = threadIdx.x - 32 * turn & THREADS - 1; i < run * p.num_tokens; i += THREADS) {
            const int pair = part.rank * run + (i & run - 1), token = i >> __ffs(run) - 1;
            float low = 0.0f, high = 0.0f;
#pragma unroll 2
            for (int sender = 0; sender < senders(); ++sender) {
                low += partial(turn, sender, 0, pair)[token];
                high += partial(turn, sender, 1, pair)[token];
            }
            if (p.norm_weight != nullptr) {
                float square = 0.0f;
#pragma unroll 1
                for (int rank = 0; rank < p.splits; ++rank)
                    square += squares[rank * TOKENS + token];
                const float scale = rsqrtf(square / p.in_features + p.eps);
                low *= scale;
                high *= scale;
            }
            p.finish(p.low_row(tile, pair), token, low, high);
        }
    }
};

// Copies one warp's steps (16 rows x STEP_COLUMNS of W each) into its ring, across tiles. A slot of
// the ring has [BLOCKS][16][8] pieces, piece c of row r at c ^ swizzle(r), then [16][ROW_SCALES].
struct Stream {
    const Gemm& p;
    const Part& part;
    int lane, tile, step;
    u32 target, scale_target;            // where the lane writes first in the first slot
    const Weight *first, *rows[COPIES];  // what it reads first, of W's first row and of the tile's
    const Scale* scale;  // of row lane % 16, in half lane / 16 of the first step

    __device__ Stream(const Gemm& p, const Part& part, const uint4* ring, int lane, int tile)
        : p(p), part(part), lane(lane), tile(tile), step(part.column_group) {
        const int row = lane / LANES_PER_ROW, block_row = lane % LANES_PER_ROW / 8 * 16 + row;
        const int piece = block_row * PIECES_PER_ROW + (lane % 8 ^ swizzle(row));
        target = opaque(shared_address(ring + piece));
        const int scales = lane % 16 * ROW_SCALES + lane / 16 * LANE_SCALES;
        scale_target = opaque(shared_address(ring + STEP_PIECES) + scales * sizeof(Scale));
        const int column = part.first_column + lane % LANES_PER_ROW * WEIGHT_PIECE;
        first = p.weight + column / PER_WEIGHT;
        point();
    }
    // Sets the pointers to the rows of the current tile.
    __device__ void point() {
        const int low = p.low_row(tile, part.group * 8);
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int row = low + lane / LANES_PER_ROW + ROWS_PER_COPY * (i % HALF_COPIES);
            const u32 size = p.in_features / PER_WEIGHT;
            rows[i] = first + static_cast<u64>(p.read_row(row, i >= HALF_COPIES)) * size;
        }
#if GROUP
        scale = p.scales + part.first_column / GROUP + lane / 16 * LANE_SCALES
            + static_cast<u64>(p.read_row(low + lane % 8, lane / 8 % 2)) * (p.in_features / GROUP);
#endif
    }
    __device__ void fetch_scales(u32 slot) {
        if (lane * LANE_SCALES >= STEP_SCALES) return;
#pragma unroll
        for (int i = 0; i < LANE_SCALES; i += SCALE_PIECE)
            copy_scales(scale_target + slot + i * sizeof(Scale), scale + step * ROW_SCALES + i);
    }
    // slot: its place in bytes.
    __device__ void fetch(u32 slot) {
        if (tile < p.num_tiles) {
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const int row = ROWS_PER_COPY * i;  // after the first; swizzle(a + b) is a XOR
                const u32 piece = (target + slot ^ 16 * swizzle(row)) + 16 * PIECES_PER_ROW * row;
                copy_piece(piece, rows[i] + step * (STEP_COLUMNS / PER_WEIGHT));
            }
            if (GROUP) fetch_scales(slot);
            step += part.column_groups;
            if (step >= part.num_steps) {
                step = part.column_group;
                tile += part.num_workers;
                point();
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
small_m_gemm(const __grid_constant__ Gemm p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    const Part part(p, warp);
    extern __shared__ __align__(128) uint4 shared[];
    uint4* ring = shared + warp * DEPTH * (SLOT_BYTES / 16);
    float* received = reinterpret_cast<float*>(shared + WARPS * DEPTH * (SLOT_BYTES / 16));
    float* squares = received + 2 * 2 * SUMS;  // by CTA of the worker, then by warp
    uint4* tokens = reinterpret_cast<uint4*>(squares + (2 + WARPS) * TOKENS);
    const int stride = part.share / PIECE + 1;  // + 1: adjacent tokens use different banks
    const WorkerSum sum = {p, part, received, squares, 8 * p.row_groups / p.splits};

    const int begin = part.column_group < part.num_steps ? part.first_tile : p.num_tiles;
    Stream stream(p, part, ring, lane, begin);
    // Rows of x past num_tokens repeat the last one; their sums are not written.
    const uint4* token = tokens + min(row, p.num_tokens - 1) * stride + 2 * quad;
#pragma unroll 1
    for (int slot = 0;; ++slot) {
        if (slot == EARLY_SLOTS) {
            sum.arrive();
            asm volatile("griddepcontrol.wait;" ::: "memory");
            // After the wait, so that the next kernel may read the output of all kernels before
            // this one without waiting itself.
            asm volatile("griddepcontrol.launch_dependents;");
            stage_tokens(
                p, tokens, stride, squares + 2 * TOKENS, part.first_column, part.share);
        }
        if (slot == DEPTH - 1) break;
        stream.fetch(slot * SLOT_BYTES);
    }

    const int first = BITS == 4 ? quad / 2 : 2 * quad;
    const uint4* piece = ring + row * PIECES_PER_ROW + (first ^ swizzle(row));
    const u32 weights = opaque(shared_address(piece) + (BITS == 4 ? quad % 2 * 8 : 0));
    const u32 scales = opaque(
        shared_address(ring + STEP_PIECES) + row * ROW_SCALES * static_cast<u32>(sizeof(Scale)));
    u32 slot = 0, previous = (DEPTH - 1) * SLOT_BYTES;
    int turn = 0;
    for (int tile = part.first_tile; tile < p.num_tiles; tile += part.num_workers) {
        float sums[4] = {};
        for (int step = part.column_group; step < part.num_steps; step += part.column_groups) {
            asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 2) : "memory");
            __syncwarp();
            // Refill the slot of the previous step: all lanes have read it.
            stream.fetch(previous);
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block)
                multiply_block(sums, weights + slot + block * 16 * BLOCK_PIECES,
                               scales + slot + block * (ROW_SCALES / BLOCKS * sizeof(Scale)),
                               token + (step * BLOCKS + block) * TOKEN_PIECES);
            previous = slot;
            slot = slot == (DEPTH - 1) * SLOT_BYTES ? 0 : slot + SLOT_BYTES;
        }
        for (int i = 0; i < 4; ++i) sums[i] *= __uint_as_float(127 - X_POWER - W_POWER << 23);
        sum.wait();
        if (tile != part.first_tile) sum.finish(tile - part.num_workers, turn - 1);
        else if (p.norm_weight != nullptr) sum.send_squares(squares + 2 * TOKENS);
        sum.send(turn, part.group * 8 + row, 2 * quad, sums);
        sum.arrive();
        ++turn;
    }
    sum.wait();
    if (turn > 0) sum.finish(part.first_tile + (turn - 1) * part.num_workers, turn - 1);
}
