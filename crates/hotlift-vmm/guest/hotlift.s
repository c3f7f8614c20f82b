# The guest program: writes pages at a given rate, checks each page before it writes it, and counts.
#
# One ELF for every VMM: it enters by PVH in 32-bit mode, maps RAM one to one with 2 MiB pages, and
# goes on in 64-bit mode. It needs no interrupt, no firmware and no device but a serial port.
# Settings come as `name=number` words on the command line; the defaults stand in `settings` below.
#
#   0x100000  this program, its page tables, one block a vCPU      (LOAD, below 2 MiB)
#   0x200000  table: what each page's record must be, 16 bytes a page
#   base      the working set, on the next 2 MiB border: `ws` bytes
#
# Page p belongs to vCPU p % vcpus alone, so no two vCPUs ever write one page. Each page carries a
# record of 16 bytes, 64-byte slot p % 64 of the page:
#
#   u64 version   how often the page was written
#   u64 sequence  vCPU << 56 | the number of this write among all writes of that vCPU, from 1
#
# The n-th write of a vCPU goes to a page that is a function of (seed, vCPU, n) alone. Hence one
# register, the number of writes so far, lets a host work out what every record must be. Five
# labels (see `head`) make that exact wherever the vCPU is stopped.
#
# All work is done in ring 3. Under a KVM without hardware virtualisation (PVM, as in nested clouds)
# ring 0 runs in KVM's instruction emulator: 6,500 writes a second there, against 22,000,000 in ring 3,
# and SSE instructions end the guest ("emulation failure"). Hence integer instructions only, too. Ports
# are opened to ring 3 by a bitmap in the TSS: the same KVM drops IOPL from the flags that iretq loads.
#
# Registers that live as long as the program:
#   rdi vCPU   rbx its block   r9 base   r10 writes last published   r13 pages owned
#   r14 start of its random numbers   r15 writes done   rbp writes left in this tick

.set MIB2,      0x200000
.set TABLE,     0x200000
.set GIBS,      64                      # identity map, page tables of 256 KiB
.set VCPUS,     8
.set GAMMA,     0x9e3779b97f4a7c15      # splitmix64
.set SERIAL,    0x3f8
.set SLEEP,     0x5158                  # write: sleep eax microseconds; read: SLEEP_HERE
.set STOLEN,    0x5160                  # read: microseconds that the VMM took from this vCPU since
.set READY,     0x515c                  # write: page tables stand, vCPUs may start at eax
.set SLEEP_HERE,0x54464c48              # "HLFT"
.set CODE,      0x08
.set USER_CODE, 0x10 | 3
.set USER_DATA, 0x18 | 3
.set TASK,      0x20
.set TSS_PORTS, 104                     # the bitmap, up to port 0x5fff
.set TSS_END,   TSS_PORTS + 0x6000 / 8 + 1

# A vCPU's block of 4 KiB; its stack grows down from the end.
.set PUBLISHED, 0                       # writes, brought up to date each tick
.set ERRORS,    8                       # records that were not what the table says
.set NEXT_TICK, 16                      # TSC
.set NEXT_LINE, 24                      # TSC
.set CREDIT,    32                      # writes due, 48.16 fixed point
.set SLEEPS,    40                      # non-zero: the VMM has a sleep port

# What the host has to know of this program, at the load address.
.section .head, "awx"
    .ascii "HLFTprg1"
    .quad vcpu_main                     # where the other vCPUs start, rdi = vCPU
    .quad blocks
    .quad published                     # at this rip PUBLISHED is newer than r10
    .quad stored_1                      # at this rip one store of write r15 + 1 is in memory,
    .quad stored_2                      # two,
    .quad stored_3                      # three,
    .quad stored_4                      # all four

.section .note.pvh, "a", @note
    .align 4
    .long 4, 8, 18                      # XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .quad start32

.globl start32
.text
.code32
start32:                                # ebx = hvm_start_info
    cld
    movl $pdpt + 7, pml4                # present, writable, user
    movl $pd + 7, pdpt
    mov $pd, %edi
    mov $0x87, %eax                     # the same, 2 MiB
    mov $512, %ecx
1:  mov %eax, (%edi)
    add $MIB2, %eax
    add $8, %edi
    loop 1b

    mov %cr4, %eax
    or $0x20, %eax                      # PAE
    mov %eax, %cr4
    mov $pml4, %eax
    mov %eax, %cr3
    mov $0xc0000080, %ecx               # EFER.LME
    rdmsr
    or $0x100, %eax
    wrmsr
    mov %cr0, %eax
    or $0x80000001, %eax                # PG, PE
    mov %eax, %cr0
    mov $tss, %eax                      # its descriptor scatters the address
    mov %ax, gdt_tss + 2
    shr $16, %eax
    mov %al, gdt_tss + 4
    mov %ah, gdt_tss + 7
    movw $TSS_PORTS, tss + 102          # where the port bitmap is, all clear: allowed
    movb $0xff, tss + TSS_END - 1       # which must end so
    lgdt gdtr
    ljmp $CODE, $start64

.code64
start64:
    mov $TASK, %eax
    ltr %ax
    mov $USER_DATA, %eax                # to ring 3
    mov %eax, %ds
    mov %eax, %es
    mov $blocks + 4096, %esp
    push $USER_DATA
    push $blocks + 4096
    push $2
    push $USER_CODE
    push $user
    iretq

user:
    mov %ebx, %ebx
    mov 24(%rbx), %rsi                  # hvm_start_info.cmdline_paddr
    test %rsi, %rsi
    jz 1f
    call parse
1:  call prepare
    mov $READY, %edx
    mov $vcpu_main, %eax
    out %eax, %dx
    xor %edi, %edi

vcpu_main:
    mov %edi, %eax
    shl $12, %eax
    lea blocks(%rax), %rbx
    lea 4096(%rbx), %rsp
    mov base, %r9
    mov owned, %r13
    xor %r10d, %r10d
    xor %r15d, %r15d
    mov $GAMMA, %rcx
    lea 1(%rdi), %rax
    imul %rcx, %rax
    add seed, %rax
    call mix
    mov %rax, %r14

    mov $SLEEP, %edx
    in %dx, %eax
    cmp $SLEEP_HERE, %eax
    sete SLEEPS(%rbx)
    call now
    mov %rax, NEXT_TICK(%rbx)

tick:
    movzwl CREDIT(%rbx), %eax           # the fraction stays
    add quota, %rax
    mov %rax, CREDIT(%rbx)
    mov %rax, %rbp
    shr $16, %rbp
1:  test %rbp, %rbp
    jz 2f
    call write_page
    dec %rbp
    jmp 1b
2:  mov %r15, PUBLISHED(%rbx)
published:
    mov %r15, %r10

    call now
    cmp NEXT_LINE(%rbx), %rax
    jb 3f
    mov tsc_khz, %rcx
    imul $1000, %rcx
    add %rcx, %rax
    mov %rax, NEXT_LINE(%rbx)
    call report
3:  mov tick_tsc, %rax
    add %rax, NEXT_TICK(%rbx)

wait:                                   # until the next tick
    call left
    jg 4f
    cmpb $0, SLEEPS(%rbx)
    je 4f
    mov $STOLEN, %edx                   # what was taken is not made up for
    in %dx, %eax
    mulq tsc_khz
    mov $1000, %ecx
    div %rcx
    add %rax, NEXT_TICK(%rbx)
    call left
4:  imul $-100, tick_tsc, %rdx          # late by 100 ticks: the debt is dropped
    cmp %rdx, %rcx
    jl 1f
    mov tick_tsc, %rdx                  # early by two: the TSC went back under us
    add %rdx, %rdx
    cmp %rdx, %rcx
    jle 2f
1:  mov %rax, NEXT_TICK(%rbx)
    jmp tick
2:  test %rcx, %rcx
    jle tick
    cmpb $0, SLEEPS(%rbx)
    je 3f
    imul $1000, %rcx, %rax
    xor %edx, %edx
    divq tsc_khz
    test %eax, %eax
    jz 3f
    mov $SLEEP, %edx
    out %eax, %dx
    jmp wait
3:  pause
    jmp wait

# Makes write number r15 + 1: table first, page second, r15 last. The labels tell a host which of
# the stores are done.
write_page:
    cmpb $'s', workload
    je 1f
    lea 1(%r15), %rax
    mov $GAMMA, %rcx
    imul %rcx, %rax
    add %r14, %rax
    call mix
    mov %r13, %rcx
    cmpb $'h', workload
    jne 2f
    cmp $230, %al                       # nine writes in ten go to the hot tenth
    jae 2f
    mov hot, %rcx
2:  mul %rcx                            # rdx = one of rcx pages
    jmp 3f
1:  mov %r15, %rax
    xor %edx, %edx
    div %r13                            # rdx = the next page in turn
3:  imul vcpus, %rdx
    add %rdi, %rdx                      # page number
    mov %rdx, %rsi
    shl $4, %rsi
    mov %edx, %ecx
    and $63, %ecx
    shl $6, %ecx
    shl $12, %rdx
    add %r9, %rdx
    add %rcx, %rdx                      # the page's record
    mov TABLE(%rsi), %rax
    mov TABLE + 8(%rsi), %rcx
    cmp %rax, (%rdx)
    jne 5f
    cmp %rcx, 8(%rdx)
    je 4f
5:  incq ERRORS(%rbx)
4:  inc %rax                            # version
    mov %rdi, %rcx
    shl $56, %rcx
    lea 1(%r15, %rcx), %rcx             # sequence
    mov %rax, TABLE(%rsi)
stored_1:
    mov %rcx, TABLE + 8(%rsi)
stored_2:
    mov %rax, (%rdx)
stored_3:
    mov %rcx, 8(%rdx)
stored_4:
    inc %r15
    ret

# rax = splitmix64's finaliser of rax. Clobbers rcx, rdx.
mix:
    mov %rax, %rdx
    shr $30, %rdx
    xor %rdx, %rax
    mov $0xbf58476d1ce4e5b9, %rcx
    imul %rcx, %rax
    mov %rax, %rdx
    shr $27, %rdx
    xor %rdx, %rax
    mov $0x94d049bb133111eb, %rcx
    imul %rcx, %rax
    mov %rax, %rdx
    shr $31, %rdx
    xor %rdx, %rax
    ret

# rcx = TSC ticks until the next tick, and the flags of that; rax = TSC. Clobbers rdx.
left:
    call now
    mov NEXT_TICK(%rbx), %rcx
    sub %rax, %rcx
    ret

# rax = TSC. Clobbers rdx.
now:
    rdtsc
    shl $32, %rdx
    or %rdx, %rax
    ret

# "hotlift vcpu=0 writes=123 errors=0"
report:
    mov $text_vcpu, %esi
    call put_text
    mov %rdi, %rax
    call put_number
    mov $text_writes, %esi
    call put_text
    mov %r15, %rax
    call put_number
    mov $text_errors, %esi
    call put_text
    mov ERRORS(%rbx), %rax
    call put_number
    mov $'\n', %al
    jmp put

put_text:                               # rsi: text, ends with 0
    lodsb
    test %al, %al
    jz 1f
    call put
    jmp put_text
1:  ret

put_number:                             # rax, in decimal
    mov $10, %ecx
    pushq $0                            # ends the digits
1:  xor %edx, %edx
    div %rcx
    add $'0', %edx
    push %rdx
    test %rax, %rax
    jnz 1b
2:  pop %rax
    test %eax, %eax
    jz 3f
    call put
    jmp 2b
3:  ret

put:                                    # al; waits until the transmitter is empty
    mov %al, %ah
    mov $SERIAL + 5, %edx
1:  in %dx, %al
    test $0x20, %al
    jnz 2f
    pause
    jmp 1b
2:  mov $SERIAL, %edx
    mov %ah, %al
    out %al, %dx
    ret

# Reads the words of the command line (rsi) into `settings`. A value that is no number counts by its
# first letter (workload=random); a word without '=' or of an unknown name is passed over.
parse:
    xor %eax, %eax                      # the name, as eight bytes
    xor %ecx, %ecx
1:  movzbl (%rsi), %edx
    inc %rsi
    test %dl, %dl
    jz 9f
    cmp $' ', %dl
    je parse
    cmp $'=', %dl
    je 2f
    shl %cl, %rdx
    or %rdx, %rax
    add $8, %cl
    jmp 1b
2:  movzbl (%rsi), %edx
    mov %edx, %edi                      # a letter...
    sub $'0', %edx
    cmp $9, %edx
    ja 4f
    xor %edi, %edi                      # ...or a number
3:  imul $10, %rdi
    add %rdx, %rdi
    inc %rsi
    movzbl (%rsi), %edx
    sub $'0', %edx
    cmp $9, %edx
    jbe 3b
4:  mov $settings, %edx
5:  cmp %rax, (%rdx)
    jne 6f
    mov %rdi, 8(%rdx)
6:  add $16, %edx
    cmp $settings_end, %edx
    jb 5b
    jmp parse
9:  ret

# Works out what the settings imply, and maps RAM up to the end of the working set.
prepare:
    mov ws, %rax
    shr $12, %rax                       # pages
    mov %rax, %rsi
    xor %edx, %edx
    divq vcpus
    mov %rax, owned
    xor %edx, %edx
    mov $10, %ecx
    div %rcx
    cmp $1, %rax
    adc $0, %rax                        # at least one page is hot
    mov %rax, hot

    mov %rsi, %rax
    shl $4, %rax
    add $TABLE + MIB2 - 1, %rax
    and $-MIB2, %rax
    mov %rax, base

    shl $12, %rsi
    add %rax, %rsi
    add $MIB2 - 1, %rsi
    shr $21, %rsi                       # 2 MiB pages to map; start32 mapped 512
    mov $512, %ecx
1:  cmp %rsi, %rcx
    jae 2f
    mov %rcx, %rax
    shl $21, %rax
    or $0x87, %rax
    mov %rax, pd(, %rcx, 8)
    inc %rcx
    jmp 1b
2:  mov $1, %ecx                        # a table is linked when it is full: see shadow paging
3:  mov %rcx, %rax
    shl $9, %rax
    cmp %rsi, %rax
    jae 4f
    mov %rcx, %rax
    shl $12, %rax
    add $pd + 7, %rax
    mov %rax, pdpt(, %rcx, 8)
    inc %rcx
    jmp 3b

4:  mov tsc_khz, %rax
    mulq tick_us
    mov $1000, %ecx
    div %rcx
    mov %rax, tick_tsc

    cmpb $'i', workload
    je 5f
    cmpq $0, owned
    je 5f
    imul $1000000, vcpus, %rcx
    mov rate, %rax
    shl $16, %rax
    mulq tick_us
    div %rcx
    mov %rax, quota
5:  ret

.data
.align 16
gdt:
    .quad 0
    .quad 0x00af9b000000ffff            # CODE: 64-bit
    .quad 0x00affb000000ffff            # USER_CODE
    .quad 0x00cff3000000ffff            # USER_DATA
gdt_tss:
    .quad 0x0000890000000000 + TSS_END - 1  # TASK, its address to be filled in
    .quad 0
gdtr:
    .word gdtr - gdt - 1
    .long gdt

# Each setting beside its name of at most eight letters.
.align 16
settings:
    .ascii "workload"
workload:   .quad 'r'                   # idle, random, sequential, hotset
    .ascii "rate\0\0\0\0"
rate:       .quad 1000                  # pages a second, all vCPUs together
    .ascii "ws\0\0\0\0\0\0"
ws:         .quad 0x1000000             # bytes
    .ascii "vcpus\0\0\0"
vcpus:      .quad 1
    .ascii "seed\0\0\0\0"
seed:       .quad 1
    .ascii "tsc_khz\0"
tsc_khz:    .quad 2000000
    .ascii "tick_us\0"
tick_us:    .quad 1000
settings_end:

text_vcpu:   .asciz "hotlift vcpu="
text_writes: .asciz " writes="
text_errors: .asciz " errors="

.bss
.align 4096
pml4:       .skip 4096
pdpt:       .skip 4096
pd:         .skip 4096 * GIBS
blocks:     .skip 4096 * VCPUS
tss:        .skip 4096
base:       .skip 8                     # of the working set
owned:      .skip 8                     # pages a vCPU owns
hot:        .skip 8                     # of these, the hot ones
tick_tsc:   .skip 8
quota:      .skip 8                     # writes a tick and vCPU, 48.16 fixed point
